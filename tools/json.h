/* json.h - writes the values of JSON to a stream; commas and brackets are the caller's. */
#pragma once

#include <stdio.h>

/* In quotes and escaped; NULL is null. A byte b that is no UTF-8, as names of files may have, is
 * written as \udc80 to \udcff, which Python reads as the same byte of a name (surrogateescape). */
void json_string(FILE *out, const char *text);

/* `before`, then the key in quotes, a colon, and the text as json_string writes it. */
void json_member(FILE *out, const char *before, const char *key, const char *text);

/* With as few digits as give the same number back; null when it is not finite. */
void json_number(FILE *out, double number);
