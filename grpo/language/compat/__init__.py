"""What users of TRL and EasyDeL hand over."""
