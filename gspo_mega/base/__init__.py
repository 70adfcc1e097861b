"""What every room uses: errors, records, the run folder, atomic file operations, processes, failpoints. No torch."""
