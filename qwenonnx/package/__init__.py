"""The package: the folder that exporting and quantizing write and serving reads."""
