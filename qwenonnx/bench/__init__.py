"""Speed and memory of a package on this machine."""
