"""What a whole offload and onload costs beyond the engines' own time, by number of engines."""
