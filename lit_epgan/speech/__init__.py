"""A hybrid recogniser from audio to words: corpus, features, GMM-HMM, decoding graph, word error rate."""
