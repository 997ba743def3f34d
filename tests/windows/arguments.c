/* arguments.c - prints its arguments, one a line, in UTF-8, and a variable that is named by the
 * first argument `-v`. `-x N` ends with this status. `-w FILE` writes to a file until it is ended.
 * `-c TEXT` prints the text, and a line when Ctrl-C is pressed. A program for tests of
 * `kvant exec`. */
#include <windows.h>

#include <shellapi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *utf8(const wchar_t *wide)
{
    static char text[4096];
    WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, sizeof text, NULL, NULL);
    return text;
}

static void write_on(const wchar_t *path)
{
    for (;;) {
        FILE *file = _wfopen(path, L"ab");
        if (file) {
            fputc('.', file);
            fclose(file);
        }
        Sleep(200);
    }
}

static HANDLE pressed;

static BOOL WINAPI on_key(DWORD event)
{
    return event == CTRL_C_EVENT && SetEvent(pressed);
}

static void wait_for_key(const wchar_t *text)
{
    pressed = CreateEventW(NULL, TRUE, FALSE, NULL);
    SetConsoleCtrlHandler(on_key, TRUE);
    printf("%s\n", utf8(text));
    fflush(stdout);
    WaitForSingleObject(pressed, INFINITE);
    Sleep(1000); /* a program that tidies up */
    printf("tidied up\n");
}

int main(void)
{
    int n = 0, status = 0;
    wchar_t **words = CommandLineToArgvW(GetCommandLineW(), &n), value[4096];
    for (int i = 1; i + 1 < n; i++) {
        if (wcscmp(words[i], L"-x") == 0)
            status = _wtoi(words[i + 1]);
        if (wcscmp(words[i], L"-w") == 0)
            write_on(words[i + 1]);
        if (wcscmp(words[i], L"-c") == 0)
            wait_for_key(words[i + 1]);
        if (wcscmp(words[i], L"-v") == 0 &&
            GetEnvironmentVariableW(words[i + 1], value, sizeof value / sizeof *value) > 0)
            printf("%s\n", utf8(value));
    }
    for (int i = 1; i < n; i++)
        printf("[%s]\n", utf8(words[i]));
    return status;
}
