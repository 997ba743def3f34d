/* safetensors.h - writes files of named tensors in the safetensors format
 * (github.com/huggingface/safetensors): 8 bytes with the header's length, little endian, a JSON
 * header, then the tensors' bytes.
 *
 * Every size is known and checked before the first byte; the file is written beside its path and
 * renamed when it is complete. kvant.tuning.safetensors, a part of the Python package, reads such
 * files. Functions that return false have complained. Not thread-safe.
 */
#ifndef KVANT_TOOLS_SAFETENSORS_H
#define KVANT_TOOLS_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Where a tensor lies behind the header. */
typedef struct safetensors_tensor {
    uint64_t offset, bytes;
} safetensors_tensor;

typedef struct safetensors {
    FILE *notes, *entries; /* members of the header, as they are planned */
    char *note_text, *entry_text;
    size_t note_bytes, entry_bytes;
    uint64_t data_at, data_bytes;
    int fd; /* -1: none */
    char path[4096];
    char beside[4112]; /* the temporary file, empty when there is none */
} safetensors;

/* safetensors_close is needed in any case. */
bool safetensors_begin(safetensors *s);

/* Adds a tensor, behind those before it, of a type of the format, "F16", whose numbers have so many
 * bytes. Names must differ. */
bool safetensors_plan(safetensors *s, const char *name, const char *type, uint32_t number_bytes,
                      const uint64_t *shape, uint32_t n_dims, safetensors_tensor *tensor);
/* Adds to the strings that the file carries beside its tensors. */
void safetensors_note(safetensors *s, const char *key, const char *value);

/* Creates the file beside path, as large as it will be, with the header; fails when the disk has no
 * room for it. Nothing can be planned from then on. */
bool safetensors_create(safetensors *s, const char *path);
/* Writes a part of a tensor; parts that are never written are zero. */
bool safetensors_write(safetensors *s, const safetensors_tensor *tensor, uint64_t offset,
                       const void *data, size_t bytes);
/* Flushes and renames: from then on the file is there. */
bool safetensors_finish(safetensors *s);

/* Closes; removes a temporary file that was not finished. */
void safetensors_close(safetensors *s);

#endif /* KVANT_TOOLS_SAFETENSORS_H */
