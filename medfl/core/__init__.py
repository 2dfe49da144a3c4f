"""What every other room uses: errors, seeding, storage, messages, `Run`, the run folder, the terminal."""
