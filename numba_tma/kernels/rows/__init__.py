"""Softmax and RMSNorm over rows: what stays where while a row is reduced and then rescaled."""
