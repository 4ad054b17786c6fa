"""What `profiles.bench dsv4` measures: attention and its state at DeepSeek-V4-Flash's dims."""
