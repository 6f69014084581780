"""The trials, one in each file: trial(cluster), and after_reboot(cluster) for the part after a reboot. Each begins and ends with an
empty node."""
