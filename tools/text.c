/* text.c - see text.h. */
#include "text.h"

#include "command.h"
#include "os.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Made from manual.txt by cmake/embed.cmake. */
extern const unsigned char manual_text[];
extern const size_t manual_text_size;

/* A 0 follows the text. NULL without memory. */
static char *read_stream(FILE *file, size_t *bytes)
{
    char block[65536];
    os_stream out;
    for (size_t n = os_stream_open(&out); n > 0;) {
        n = fread(block, 1, sizeof block, file);
        fwrite(block, 1, n, out.file);
    }
    return os_stream_text(&out, bytes);
}

static bool continues(unsigned char byte)
{
    return (byte & 0xc0) == 0x80;
}

/* Whether four bytes of UTF-8 stand for a number beyond U+10FFFF. llama.cpp decodes them and throws
 * when it encodes the number again. It replaces all other malformed bytes. */
static bool is_beyond_unicode(const unsigned char *at)
{
    return (at[0] & 0xf8) == 0xf0 && continues(at[1]) && continues(at[2]) && continues(at[3]) &&
           (at[0] > 0xf4 || (at[0] == 0xf4 && at[1] > 0x8f));
}

bool text_check(const char *name, const char *text, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)text,
                        *zero = bytes > 0 ? memchr(text, 0, bytes) : NULL;
    if (zero != NULL)
        return complain("%s: this is not a text, because byte %zu is 0, as in binary files", name,
                        (size_t)(zero - at));
    for (size_t i = 0; i + 4 <= bytes; i++)
        if (is_beyond_unicode(at + i))
            return complain("%s: this is not a text, because the character at byte %zu is beyond "
                            "U+10FFFF (bytes %02x %02x %02x %02x)",
                            name, i, at[i], at[i + 1], at[i + 2], at[i + 3]);
    return true;
}

static char *copy_manual(size_t *bytes)
{
    char *text = malloc(manual_text_size + 1);
    if (text == NULL) {
        complain(MANUAL_TEXT ": out of memory");
        return NULL;
    }
    memcpy(text, manual_text, manual_text_size);
    text[manual_text_size] = 0;
    *bytes = manual_text_size;
    return text;
}

static char *read_file(const char *path, size_t *bytes)
{
    if (strcmp(path, MANUAL_TEXT) == 0)
        return copy_manual(bytes);
    errno = 0;
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    char *text = file != NULL ? read_stream(file, bytes) : NULL;
    if (text == NULL || ferror(file)) {
        complain("%s: %s", path, file != NULL && text == NULL ? "out of memory" : strerror(errno));
        free(text);
        text = NULL;
    }
    if (file != NULL && file != stdin)
        fclose(file);
    return text;
}

bool text_given(const char *command, const char *file)
{
    if (file != NULL)
        return true;
    complain("%s: no text given", command);
    return hint("give -f text.txt; scripts/fetch.py text makes one");
}

char *read_text(const char *path, size_t *bytes)
{
    char *text = read_file(path, bytes);
    if (text == NULL || text_check(strcmp(path, "-") == 0 ? "standard input" : path, text, *bytes))
        return text;
    free(text);
    return NULL;
}
