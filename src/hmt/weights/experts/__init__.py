"""MoE execution backends: hybrid, resident and streamed experts."""
