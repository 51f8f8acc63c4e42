"""`runner.publish`: upload the model of a run to the Hugging Face Hub."""
