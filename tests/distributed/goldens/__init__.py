"""Golden arrays of the model's forward and backward pass, on ragged rows: the cases (`cases`), transformers' pass in
float64 over each example alone (`truth`), and the script that writes the files (`make`)."""
