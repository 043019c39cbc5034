"""What a run leaves: records (Parquet), the metrics computed from them, and a Perfetto trace."""
