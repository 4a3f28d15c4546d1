"""What the tests compare with: implementations that were not written here."""
