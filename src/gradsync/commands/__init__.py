"""The upper floor: commands, which use the library and which nothing below imports."""
