"""What a configuration will need and do before anything is loaded: sizes, buckets, forecasts, searches for settings."""
