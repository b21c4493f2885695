"""What users of TRL, EasyDeL and RLinf hand over."""
