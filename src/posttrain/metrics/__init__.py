"""What is measured: the metrics of a step, the optional meter of FLOPs and MFU, the peaks that it divides by."""
