/* gguf_file.h - what a model's file says about its size, read without llama.cpp. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

typedef struct gguf_size {
    uint32_t n_layers;
    uint64_t bytes; /* of all parts of a model in several files */
} gguf_size;

/* False when the file cannot be read, is no GGUF file, or states no number of layers from 1 to
 * GGUF_MAX_LAYERS. Lengths in the file are checked against what the file still holds. */
#define GGUF_MAX_LAYERS 512u
bool gguf_read_size(const char *path, gguf_size *size);

/* Bytes of the file, or of all parts of NAME-00001-of-00003.gguf; 0 when there is none. */
uint64_t gguf_bytes(const char *path);
