"""How clients and engines are spoken to, one file for each family of routes (pure)."""
