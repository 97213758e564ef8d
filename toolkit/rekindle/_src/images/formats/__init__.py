"""The image formats that are read, a module each: its header, and the file without everything that is not pixels."""
