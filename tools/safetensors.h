/* safetensors.h - writes files of named tensors in the safetensors format
 * (github.com/huggingface/safetensors): 8 bytes with the header's length, little endian, a JSON
 * header, then the tensors' bytes.
 *
 * Every size is known and checked before the first byte; the file is written beside its path and
 * renamed when it is complete. kvant.tuning.safetensors, a part of the Python package, reads such
 * files. Errors are one line in err; nothing is printed. Not thread-safe.
 */
#ifndef KVANT_TOOLS_SAFETENSORS_H
#define KVANT_TOOLS_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cJSON;

#define SAFETENSORS_MAX_DIMS 8u
#define SAFETENSORS_MAX_HEADER (100u << 20) /* as the reference implementation has it */

typedef struct safetensors_tensor {
    const char *name;
    const char *type; /* "F16"; constant */
    uint32_t n_dims;
    uint64_t shape[SAFETENSORS_MAX_DIMS]; /* the last one is contiguous */
    uint64_t offset, bytes;               /* offset: behind the header */
} safetensors_tensor;

/* Tensors in the order of their bytes, which is that of safetensors_plan; zero it before. */
typedef struct safetensors {
    safetensors_tensor *tensors;
    size_t n, capacity;
    struct cJSON *header; /* names and metadata live in it */
    uint64_t data_at, data_bytes;
    int fd; /* -1: none */
    char path[4096];
    char beside[4112]; /* the temporary file, empty when there is none */
} safetensors;

/* Adds a tensor to a file to be written; name is copied. False when its size cannot be. */
bool safetensors_plan(safetensors *s, const char *name, const char *type, const uint64_t *shape, uint32_t n_dims,
                      char *err, size_t errlen);
/* Adds to the strings that the file carries beside its tensors. */
bool safetensors_note(safetensors *s, const char *key, const char *value);

/* Creates the file beside path, as large as it will be, with the header; fails when the disk has no
 * room for it. */
bool safetensors_create(safetensors *s, const char *path, char *err, size_t errlen);
/* Writes a part of a tensor; parts that are never written are zero. */
bool safetensors_write(safetensors *s, const safetensors_tensor *tensor, uint64_t offset, const void *data,
                       size_t bytes, char *err, size_t errlen);
/* Flushes and renames: from then on the file is there. */
bool safetensors_finish(safetensors *s, char *err, size_t errlen);

/* Closes; removes a temporary file that was not finished. */
void safetensors_close(safetensors *s);

#endif /* KVANT_TOOLS_SAFETENSORS_H */
