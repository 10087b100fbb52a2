"""The twins at K3's own dimensions, part by part: what mini checkpoints cannot show."""
