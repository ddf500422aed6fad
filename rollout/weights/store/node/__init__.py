"""The agent of the store on one node."""
