"""Speed and metric of sync policies on tasks that one worker clearly learns."""
