"""What rooms exchange: frozen dataclasses and Protocols, without behaviour."""
