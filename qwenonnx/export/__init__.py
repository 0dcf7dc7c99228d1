"""From a checkpoint to an fp32 package."""
