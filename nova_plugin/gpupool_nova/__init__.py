"""What gpupool and Nova have in common: names in Placement and the measure of fragmentation."""
