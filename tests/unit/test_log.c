/* test_log.c - the plug-in's messages are one line each, whatever text they name. */
#define _POSIX_C_SOURCE 200809L /* dup2, fileno */

#include "testing.h"

#include <unistd.h>

#include "../../integrations/llama.cpp/log.h"

CASE(a_message_is_one_line)
{
    char text[64] = "";
    FILE *file = tmpfile();
    const int own = dup(STDERR_FILENO);

    assert_non_null(file);
    assert_true(own >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
    kvp_error("KVANT_PRESET=%s: refused", "a\nb\r\x1b[31m\tc\x7f\xc2\x9b\xc3\x9b");
    assert_true(dup2(own, STDERR_FILENO) >= 0);
    rewind(file);
    assert_int_equal(fread(text, 1, sizeof(text) - 1, file),
                     strlen("kvant: KVANT_PRESET=a b  [31m c   \xc3\x9b: refused\n"));
    assert_string_equal(text, "kvant: KVANT_PRESET=a b  [31m c   \xc3\x9b: refused\n");
    fclose(file);
    close(own);
}

RUN_CASES(NULL, NULL)
