/* text.c - see text.h. */
#include "text.h"

#include "command.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Made from manual.txt by cmake/embed.cmake. */
extern const unsigned char manual_text[];
extern const size_t manual_text_size;

static char *read_stream(FILE *file, size_t *bytes)
{
    size_t capacity = 1 << 16, n = 0;
    char *text = malloc(capacity);
    while (text != NULL) {
        n += fread(text + n, 1, capacity - n - 1, file);
        if (n < capacity - 1)
            break;
        char *larger = capacity <= SIZE_MAX / 2 ? realloc(text, capacity *= 2) : NULL;
        if (larger == NULL)
            free(text);
        text = larger;
    }
    if (text != NULL)
        text[n] = 0;
    *bytes = n;
    return text;
}

static char *copy_manual(size_t *bytes)
{
    char *text = malloc(manual_text_size + 1);
    if (text == NULL) {
        complain("out of memory");
        return NULL;
    }
    memcpy(text, manual_text, manual_text_size);
    text[manual_text_size] = 0;
    *bytes = manual_text_size;
    return text;
}

static bool continues(unsigned char byte)
{
    return (byte & 0xc0) == 0x80;
}

/* Four bytes of UTF-8 for a number beyond U+10FFFF: llama.cpp decodes them and throws when it encodes the number again. All other
 * malformed bytes it replaces. */
static bool is_beyond_unicode(const unsigned char *at)
{
    return (at[0] & 0xf8) == 0xf0 && continues(at[1]) && continues(at[2]) && continues(at[3]) &&
           (at[0] > 0xf4 || (at[0] == 0xf4 && at[1] > 0x8f));
}

bool text_check(const char *name, const char *text, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)text, *zero = bytes > 0 ? memchr(text, 0, bytes) : NULL;
    if (zero != NULL)
        return complain("%s: no text, byte %zu is 0 as in binary files", name, (size_t)(zero - at));
    for (size_t i = 0; i + 4 <= bytes; i++)
        if (is_beyond_unicode(at + i))
            return complain("%s: no text, the character at byte %zu is beyond U+10FFFF (bytes %02x %02x %02x %02x)",
                            name, i, at[i], at[i + 1], at[i + 2], at[i + 3]);
    return true;
}

static char *read_file(const char *path, size_t *bytes)
{
    const bool standard_input = strcmp(path, "-") == 0;
    errno = 0;
    FILE *file = standard_input ? stdin : fopen(path, "rb");
    if (file == NULL) {
        complain("%s: %s", path, strerror(errno));
        return NULL;
    }
    char *text = read_stream(file, bytes);
    if (text == NULL) {
        complain("%s: out of memory", path);
    } else if (ferror(file)) {
        complain("%s: %s", path, strerror(errno));
        free(text);
        text = NULL;
    }
    if (!standard_input)
        fclose(file);
    return text;
}

char *read_text(const char *path, size_t *bytes)
{
    if (strcmp(path, MANUAL_TEXT) == 0)
        return copy_manual(bytes);
    char *text = read_file(path, bytes);
    if (text == NULL || text_check(strcmp(path, "-") == 0 ? "standard input" : path, text, *bytes))
        return text;
    free(text);
    return NULL;
}
