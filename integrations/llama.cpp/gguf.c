/* gguf.c - see gguf.h. */
#define _POSIX_C_SOURCE 200809L /* fseeko */
#define _FILE_OFFSET_BITS 64
#include "gguf.h"

#include <string.h>

#define MOST_KEYS 65536u /* a file with more is damaged: models have some dozens */

/* Bytes of a number of this type; 0: the type is no number. */
static size_t bytes_of(uint32_t type)
{
    static const uint8_t bytes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
    return type < sizeof(bytes) ? bytes[type] : 0;
}

static bool take(gguf_reader *r, void *to, size_t bytes)
{
    if (bytes > r->left || fread(to, 1, bytes, r->file) != bytes)
        return false;
    r->left -= bytes;
    return true;
}

static bool skip(gguf_reader *r, uint64_t n, size_t each)
{
    char small[256];
    if (each == 0 || n > r->left / each)
        return false;
    if (n * each <= sizeof(small)) /* a vocabulary's words: seeking would read the block again */
        return take(r, small, (size_t)n * each);
    r->left -= n * each;
    return fseeko(r->file, (off_t)(n * each), SEEK_CUR) == 0;
}

static bool take_text(gguf_reader *r, char text[GGUF_TEXT])
{
    uint64_t length;
    text[0] = 0;
    if (!take(r, &length, sizeof(length)))
        return false;
    if (length >= GGUF_TEXT)
        return skip(r, length, 1);
    text[length] = 0;
    return take(r, text, (size_t)length);
}

static bool skip_array(gguf_reader *r)
{
    uint32_t type;
    uint64_t n, length;
    if (!take(r, &type, sizeof(type)) || !take(r, &n, sizeof(n)))
        return false;
    if (type != GGUF_STRING) /* the format allows arrays of arrays, and no model has them */
        return skip(r, n, bytes_of(type));
    for (; n > 0; n--)
        if (!take(r, &length, sizeof(length)) || !skip(r, length, 1))
            return false;
    return true;
}

bool gguf_begin(gguf_reader *r, FILE *file, uint64_t bytes)
{
    struct {
        char magic[4];
        uint32_t version;
        uint64_t n_tensors, n_keys;
    } head;
    rewind(file);
    *r = (gguf_reader){ .file = file, .left = bytes };
    if (!take(r, &head, sizeof(head)) || memcmp(head.magic, "GGUF", sizeof(head.magic)) != 0 ||
        head.version < 2 || head.version > 3 || head.n_keys > MOST_KEYS)
        return false;
    r->n_keys = head.n_keys;
    return true;
}

bool gguf_take_name(gguf_reader *r, char name[GGUF_TEXT])
{
    return r->n_keys > 0 && r->n_keys-- > 0 && take_text(r, name);
}

bool gguf_take_value(gguf_reader *r, gguf_value *value)
{
    value->number = 0;
    value->text[0] = 0;
    if (!take(r, &value->type, sizeof(value->type)))
        return false;
    switch (value->type) {
    case GGUF_UINT32:
    case GGUF_INT32: return take(r, &value->number, sizeof(value->number));
    case GGUF_STRING: return take_text(r, value->text);
    case GGUF_ARRAY: return skip_array(r);
    default: return skip(r, 1, bytes_of(value->type));
    }
}
