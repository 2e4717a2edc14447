"""Plans for other machines and loads: objectives, profiles, explanations."""
