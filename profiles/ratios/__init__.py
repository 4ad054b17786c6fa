"""What `profiles.bench` measures of whole decode steps: a file for each floor or peer."""
