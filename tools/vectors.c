/* vectors.c - see vectors.h. A reader finds the shape of a file: where numbers begin, how many rows
 * there are, how far apart they are. The shape is checked against the file's size before memory is
 * allocated. */
#include "vectors.h"

#include "args.h"
#include "command.h"
#include "os.h"

#include <errno.h>
#include <kvant/index.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct shape {
    uint64_t n, dim, start, gap; /* gap: bytes before each row */
    bool bytes;                  /* uint8 instead of float32 */
} shape;

typedef struct source {
    const char *path;
    int file;
    uint64_t size;
} source;

enum { MOST_HEAD = 4096 };

static bool unusable(const source *s, const char *why)
{
    return complain("%s: %s", s->path, why);
}

static uint64_t row_bytes(const shape *p)
{
    return p->gap + p->dim * (p->bytes ? 1 : 4);
}

static uint32_t read_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* The text that follows `'key':` in the header of a .npy file, without blanks; NULL when the key is
 * not there. */
static const char *value_of(const char *head, const char *key)
{
    const char *at = strstr(head, key);
    if (at == NULL)
        return NULL;
    for (at += strlen(key); *at == ' ' || *at == ':'; at++)
        ;
    return at;
}

static bool read_npy_dictionary(const source *s, const char *head, shape *p)
{
    const char *descr = value_of(head, "'descr'"), *order = value_of(head, "'fortran_order'"),
               *size = value_of(head, "'shape'");
    unsigned long long n, dim;
    int used = 0;
    if (descr == NULL || order == NULL || size == NULL)
        return unusable(s, "its header is damaged");
    p->bytes = strncmp(descr, "'|u1'", 5) == 0;
    if (!p->bytes && strncmp(descr, "'<f4'", 5) != 0)
        return unusable(s, "its numbers are neither float32 nor uint8; numpy.save(file, "
                           "array.astype('<f4')) makes a file of float32");
    if (strncmp(order, "False", 5) != 0 || sscanf(size, "(%llu, %llu)%n", &n, &dim, &used) != 2 ||
        used == 0)
        return unusable(s, "it is not an array of two dimensions in C order");
    p->n = n;
    p->dim = dim;
    return true;
}

static bool read_npy(const source *s, const uint8_t *head, size_t n, shape *p)
{
    char text[MOST_HEAD + 1];
    if (n < 12 || memcmp(head, "\x93NUMPY", 6) != 0 || head[6] < 1 || head[6] > 3)
        return unusable(s, "it is not a .npy file of version 1 to 3");
    const uint64_t start = head[6] == 1 ? 10 : 12,
                   length = head[6] == 1 ? (uint64_t)head[8] | (uint64_t)head[9] << 8
                                         : read_u32(head + 8);
    if (start + length > n)
        return unusable(s, "its header is cut short, or longer than 4 KiB");
    memcpy(text, head + start, length);
    text[length] = 0;
    p->start = start + length;
    return read_npy_dictionary(s, text, p);
}

/* Rows that each begin with their dimension. */
static bool read_vecs(const source *s, const uint8_t *head, size_t n, shape *p)
{
    if (n < 4)
        return unusable(s, "it is empty");
    p->dim = read_u32(head);
    p->gap = 4;
    p->n = s->size / row_bytes(p);
    return true;
}

/* A .fbin or .u8bin file: the number of vectors, the dimension, the vectors. */
static bool read_bin(const source *s, const uint8_t *head, size_t n, shape *p)
{
    if (n < 8)
        return unusable(s, "it is shorter than its header");
    p->n = read_u32(head);
    p->dim = read_u32(head + 4);
    p->start = 8;
    return true;
}

static const struct reader {
    const char *ending;
    bool bytes;
    bool (*read)(const source *s, const uint8_t *head, size_t n, shape *p);
} readers[] = {
    { ".npy", false, read_npy },  { ".fvecs", false, read_vecs }, { ".bvecs", true, read_vecs },
    { ".fbin", false, read_bin }, { ".u8bin", true, read_bin },
};

static const struct reader *reader_of(const char *path)
{
    const char *ending = strrchr(path, '.');
    for (size_t i = 0; ending != NULL && i < sizeof readers / sizeof *readers; i++)
        if (args_same_letters(ending, readers[i].ending, SIZE_MAX))
            return &readers[i];
    complain("%s: the name must end with .npy, .fvecs, .bvecs, .fbin or .u8bin", path);
    return NULL;
}

static bool check_shape(const source *s, const shape *p)
{
    if (p->dim < 1 || p->dim > KVANT_INDEX_MAX_DIM)
        return complain("%s: the vectors have %llu dimensions, but an index has 1 to %u", s->path,
                        (unsigned long long)p->dim, KVANT_INDEX_MAX_DIM);
    if (p->n > KVANT_INDEX_MAX_VECTORS || p->start + p->n * row_bytes(p) != s->size)
        return unusable(
            s,
            "its size is not the size that its header states: it is cut short, or of another kind");
    return p->n > 0 || unusable(s, "it has no vectors");
}

static bool convert(const source *s, const shape *p, const uint8_t *row, float *out)
{
    if (p->gap != 0 && read_u32(row) != p->dim)
        return unusable(s, "its vectors differ in dimension");
    if (!p->bytes)
        memcpy(out, row + p->gap, p->dim * sizeof *out);
    for (uint64_t j = 0; p->bytes && j < p->dim; j++)
        out[j] = row[p->gap + j];
    return true;
}

enum { ROWS_AT_ONCE = 256 };

static bool read_rows(const source *s, const shape *p, vectors *out)
{
    const size_t bytes = row_bytes(p);
    uint8_t *rows = malloc(ROWS_AT_ONCE * bytes);
    bool ok = rows != NULL || complain("search: out of memory");
    for (size_t i = 0; ok && i < out->n; i += ROWS_AT_ONCE) {
        const size_t n = out->n - i < ROWS_AT_ONCE ? out->n - i : ROWS_AT_ONCE;
        ok = kvant_os_read_at(s->file, rows, n * bytes, p->start + i * bytes) ||
             unusable(s, "it cannot be read");
        for (size_t j = 0; ok && j < n; j++)
            ok = convert(s, p, rows + j * bytes, out->rows + (i + j) * p->dim);
    }
    free(rows);
    return ok;
}

static bool read_file(source *s, const struct reader *reader, size_t most, vectors *out)
{
    uint8_t head[MOST_HEAD];
    shape p = { .bytes = reader->bytes };
    if (!kvant_os_size(s->file, &s->size))
        return unusable(s, "it is not a regular file");
    const size_t n = s->size < sizeof head ? (size_t)s->size : sizeof head;
    if (!kvant_os_read_at(s->file, head, n, 0))
        return unusable(s, "it cannot be read");
    if (!reader->read(s, head, n, &p) || !check_shape(s, &p))
        return false;
    out->n = most != 0 && most < p.n ? most : (size_t)p.n;
    out->dim = (uint32_t)p.dim;
    out->rows = calloc(out->n, out->dim * sizeof *out->rows);
    if (out->rows == NULL)
        return complain("%s: there is not enough memory for %zu vectors of %u dimensions", s->path,
                        out->n, (unsigned)out->dim);
    return read_rows(s, &p, out);
}

bool vectors_read(const char *path, size_t most, vectors *out)
{
    const struct reader *reader = reader_of(path);
    source s = { .path = path };
    *out = (vectors){ .rows = NULL };
    if (reader == NULL)
        return false;
    if (!kvant_os_open(path, &s.file))
        return complain("cannot open %s: %s", path, strerror(errno));
    const bool ok = read_file(&s, reader, most, out);
    kvant_os_close(s.file);
    if (!ok)
        vectors_free(out);
    return ok;
}

void vectors_free(vectors *v)
{
    free(v->rows);
    v->rows = NULL;
}
