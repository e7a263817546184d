package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestGuaranteesNameTestsThatExist: a promise in docs/guarantees.md is worth what its test is.
func TestGuaranteesNameTestsThatExist(t *testing.T) {
	const doc = "docs/guarantees.md"
	text, err := os.ReadFile(filepath.Join(root, doc))
	if err != nil {
		t.Fatal(err)
	}
	var tests strings.Builder
	for _, s := range sources(t) {
		if s.isTest {
			code, err := os.ReadFile(filepath.Join(root, s.path))
			if err != nil {
				t.Fatal(err)
			}
			tests.Write(code)
		}
	}
	for _, name := range regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(string(text), -1) {
		if !strings.Contains(tests.String(), "\nfunc "+name[1]+"(") {
			t.Errorf("%s names %s, which doesn't exist", doc, name[1])
		}
	}
	for _, promise := range regexp.MustCompile(`(?m)^\| G\d+ .*$`).FindAllString(string(text), -1) {
		if !strings.Contains(promise, "`Test") {
			t.Errorf("%s names no test: %.60s", doc, promise)
		}
	}
}
