/* safetensors.h - writes files of named tensors in the safetensors format
 * (github.com/huggingface/safetensors). A file has 8 bytes with the length of the header in little
 * endian, a JSON header, then the bytes of the tensors.
 *
 * Every size is known and checked before the first byte is written. The data goes to a temporary
 * file in the same folder, which is renamed when it is complete. kvant.tuning.safetensors, a part
 * of the Python package, reads such files. Functions that return false have complained. Not
 * thread-safe. */
#pragma once

#include "os.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The position of a tensor's bytes after the header. */
typedef struct safetensors_tensor {
    uint64_t offset, bytes;
} safetensors_tensor;

typedef struct safetensors {
    os_stream notes, entries; /* members of the header, as they are planned */
    uint64_t data_at, data_bytes;
    int fd; /* -1: none */
    char path[4096];
    char beside[4120]; /* the part that is written (kvant_os_begin) */
} safetensors;

/* safetensors_close is needed in any case. */
bool safetensors_begin(safetensors *s);

/* Plans one more tensor after all planned ones. type is a type of the format, such as "F16", and
 * number_bytes the size of one of its numbers. Names must differ. */
bool safetensors_plan(safetensors *s, const char *name, const char *type, uint32_t number_bytes,
                      const uint64_t *shape, uint32_t n_dims, safetensors_tensor *tensor);
/* Adds a string to the metadata of the file. */
void safetensors_note(safetensors *s, const char *key, const char *value);

/* Creates the temporary file next to `path` in its full size and writes the header. Fails when the
 * disk has no room for it. Nothing can be planned afterwards. */
bool safetensors_create(safetensors *s, const char *path);
/* Writes a part of a tensor; parts that are never written are zero. */
bool safetensors_write(safetensors *s, const safetensors_tensor *tensor, uint64_t offset,
                       const void *data, size_t bytes);
/* Flushes and renames: from then on the file is there. */
bool safetensors_finish(safetensors *s);

/* Closes; removes a temporary file that was not finished. */
void safetensors_close(safetensors *s);
