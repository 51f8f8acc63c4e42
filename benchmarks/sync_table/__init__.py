"""The published experiment on CoLA, one worker against four, with every way of synchronising."""
