"""The published experiment on CoLA, one worker and four workers, with every sync policy."""
