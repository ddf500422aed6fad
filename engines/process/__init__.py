"""Engine processes: started under a guard, identified, stopped, confirmed gone; TCP ports."""
