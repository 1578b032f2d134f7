"""Machines that are described: by name, by file, and the data sheets behind the names."""
