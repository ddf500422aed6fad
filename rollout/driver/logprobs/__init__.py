"""Log-probabilities of the engines compared with the trainer's."""
