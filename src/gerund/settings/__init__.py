"""Settings, each declared once: attention plan, encoder, model, sampling. No torch."""
