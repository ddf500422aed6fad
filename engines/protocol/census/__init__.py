"""What each kind of engine has of its weights after a request, and what is done about it."""
