/* vectors.h - reads whole files of vectors as floats: .npy (float32 or uint8, two dimensions),
 * .fvecs, .bvecs, .fbin and .u8bin. A file must have exactly the size that its header states. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct vectors {
    float *rows; /* n x dim */
    size_t n;
    uint32_t dim;
} vectors;

/* False after complaining. most: rows that are read at most; 0: all. */
bool vectors_read(const char *path, size_t most, vectors *out);
void vectors_free(vectors *v);
