/* Says whose rights it has. It belongs to root and is setuid, which is for the runtime to allow or not. */
#include <stdio.h>
#include <unistd.h>

int main(void) {
    printf("Effective uid: %d\n", (int)geteuid());
    return 0;
}
