"""From an fp32 package to a quantized one."""
