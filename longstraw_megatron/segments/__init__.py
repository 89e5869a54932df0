"""What one layer does for one segment."""
