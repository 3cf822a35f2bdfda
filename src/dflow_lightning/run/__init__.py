"""One run: Lightning's command line, strategy, checkpoints, signals, progress."""
