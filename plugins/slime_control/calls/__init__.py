"""Control calls to many engines, and questions to all engines."""
