package lint

import (
	"bytes"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	root   = "../.."
	module = "kmirror/"

	longestFunction = 80 // lines, with the closing brace
)

// topLevel is what may lie in the repository's root, beside hidden files and what .gitignore names.
var topLevel = []string{
	"proxy", "protocol", "forwarder", "config", "cmd", "internal", "test", "docs",
	"go.mod", "go.sum", "Makefile", "README.md", "LICENSE",
}

// mayImport lists for a folder the packages of ours that the code under it may import, a trailing slash meaning all below.
// The first entry that fits a folder counts. Test files may import testOnly and, outside of protocol and config, no more.
var mayImport = []struct {
	folder   string
	packages []string
}{
	{"protocol", nil},
	{"config", nil},
	{"proxy", []string{"protocol", "internal/bufpool", "internal/sock"}},
	{"forwarder", []string{"protocol", "internal/bufpool", "internal/sock", "internal/unpack"}},
	{"internal/admin", nil},
	{"internal/bufpool", nil},
	{"internal/demo", nil},
	{"internal/kafkatest", nil},
	{"internal/lint", nil},
	{"internal/scripted", []string{"protocol", "internal/scripted/"}},
	{"internal/sock", nil},
	{"internal/unpack", nil},
	{"internal/verify", []string{"protocol", "internal/unpack"}},
	{"internal", nil},
	{"cmd", []string{"config", "proxy", "forwarder", "protocol", "internal/admin", "internal/sock", "internal/verify", "internal/demo"}},
	{"test", []string{"protocol", "forwarder", "internal/kafkatest", "internal/verify", "test/"}}, // forwarder and verify for the types of the status and the report
}

// testOnly are the packages that no code outside of tests may import.
var testOnly = []string{"internal/kafkatest", "internal/scripted", "internal/tunnel"}

var vagueNames = []string{"util", "utils", "common", "helper", "helpers", "types", "misc", "shared"}

// source is a parsed Go file of the repository.
type source struct {
	path   string // from the root, with slashes
	text   []byte
	file   *ast.File
	fset   *token.FileSet
	isTest bool
}

func (s *source) line(pos token.Pos) int { return s.fset.Position(pos).Line }

// sources parses every Go file that isn't hidden, vendored or test data.
func sources(t *testing.T) []*source {
	t.Helper()
	var all []*source
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		base := entry.Name()
		if entry.IsDir() {
			if name != root && (strings.HasPrefix(base, ".") || base == "testdata" || base == "bin") {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(base) != ".go" {
			return nil
		}
		s := &source{path: relative(name), fset: token.NewFileSet(), isTest: strings.HasSuffix(base, "_test.go")}
		if s.text, err = os.ReadFile(name); err != nil {
			return err
		}
		if s.file, err = parser.ParseFile(s.fset, name, s.text, parser.ParseComments); err != nil {
			return err
		}
		all = append(all, s)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 10 {
		t.Fatalf("found %d Go files under %s, want the whole repository", len(all), root)
	}
	return all
}

func relative(name string) string {
	rel, err := filepath.Rel(root, name)
	if err != nil {
		panic(err) // both are relative to the same folder
	}
	return filepath.ToSlash(rel)
}

func TestPackageDirections(t *testing.T) {
	for _, s := range sources(t) {
		folder := filepath.ToSlash(filepath.Dir(s.path))
		for _, imp := range s.file.Imports {
			path, err := strconv.Unquote(imp.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if target, ours := strings.CutPrefix(path, module); ours && !allowed(folder, target, s.isTest) {
				t.Errorf("%s:%d: %s imports %s, which its place in cmd → {config, proxy, forwarder} → protocol doesn't allow",
					s.path, s.line(imp.Pos()), folder, target)
			}
		}
	}
}

func allowed(folder, target string, isTest bool) bool {
	if isTest && (target == folder || within(target, testOnly)) {
		return true
	}
	for _, rule := range mayImport {
		if folder == rule.folder || strings.HasPrefix(folder, rule.folder+"/") {
			return target != folder && within(target, rule.packages)
		}
	}
	return false
}

// within says whether target is one of packages or lies below one that ends in a slash.
func within(target string, packages []string) bool {
	return slices.ContainsFunc(packages, func(p string) bool {
		return target == strings.TrimSuffix(p, "/") || strings.HasSuffix(p, "/") && strings.HasPrefix(target, p)
	})
}

func TestAllowedKnowsTheDirections(t *testing.T) {
	for _, tc := range []struct {
		folder, target string
		isTest, want   bool
	}{
		{"proxy", "protocol", false, true},
		{"proxy", "internal/bufpool", false, true},
		{"proxy", "forwarder", false, false},
		{"proxy", "forwarder", true, false},
		{"forwarder", "proxy", true, false},
		{"forwarder", "config", false, false},
		{"forwarder", "internal/kafkatest", false, false},
		{"forwarder", "internal/kafkatest", true, true},
		{"protocol", "internal/bufpool", false, false},
		{"protocol", "protocol", true, true},
		{"config", "protocol", false, false},
		{"cmd/kmirror", "forwarder", false, true},
		{"cmd/kmirror", "internal/kafkatest", false, false},
		{"internal/new", "protocol", false, false},
		{"test/bench", "proxy", true, false},
	} {
		if got := allowed(tc.folder, tc.target, tc.isTest); got != tc.want {
			t.Errorf("allowed(%q, %q, %v) = %v, want %v", tc.folder, tc.target, tc.isTest, got, tc.want)
		}
	}
}

func TestNoVaguePackageNames(t *testing.T) {
	for _, s := range sources(t) {
		if slices.Contains(vagueNames, s.file.Name.Name) {
			t.Errorf("%s: package %s says nothing about its content", s.path, s.file.Name.Name)
		}
	}
}

func TestEveryPackageIsDescribed(t *testing.T) {
	described := make(map[string]bool)
	for _, s := range sources(t) {
		folder := filepath.Dir(s.path)
		described[folder] = described[folder] || s.file.Doc != nil
	}
	for folder, ok := range described {
		if !ok {
			t.Errorf("%s: no package comment says what the package is, and what not", folder)
		}
	}
}

func TestFunctionsAreShort(t *testing.T) {
	for _, s := range sources(t) {
		for _, decl := range s.file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if n := s.line(f.End()) - s.line(f.Pos()) + 1; n > longestFunction {
				t.Errorf("%s:%d: %s has %d lines, want at most %d", s.path, s.line(f.Pos()), f.Name.Name, n, longestFunction)
			}
		}
	}
}

var (
	openWork   = regexp.MustCompile(`\b(TODO|FIXME|XXX)\b`)
	withNumber = regexp.MustCompile(`\b(TODO|FIXME)\(#\d+\)`)
)

func TestOpenWorkNamesItsIssue(t *testing.T) {
	for _, s := range sources(t) {
		for _, group := range s.file.Comments {
			for _, c := range group.List {
				if openWork.MatchString(c.Text) && !withNumber.MatchString(c.Text) {
					t.Errorf("%s:%d: open work without its issue's number, as in TODO(#12): %s", s.path, s.line(c.Pos()), c.Text)
				}
			}
		}
	}
}

func TestGofmt(t *testing.T) {
	for _, s := range sources(t) {
		want, err := format.Source(s.text)
		if err != nil {
			t.Errorf("%s: %v", s.path, err)
		} else if !bytes.Equal(s.text, want) {
			t.Errorf("%s: gofmt would change it", s.path)
		}
	}
}

func TestNothingElseAtTheTop(t *testing.T) {
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	ignored, err := os.ReadFile(filepath.Join(root, ".gitignore"))
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, ".") || slices.Contains(topLevel, name) || slices.Contains(strings.Fields(string(ignored)), "/"+name+"/") {
			continue
		}
		t.Errorf("%s lies at the top, where only %v may", name, topLevel)
	}
}

var metricName = regexp.MustCompile(`^kmirror_[a-z0-9_]+[a-z0-9]$`)

// TestOperationsNamesEveryMetric takes each string of the program that has the form of a metric's name for one.
func TestOperationsNamesEveryMetric(t *testing.T) {
	const doc = "docs/operations.md"
	text, err := os.ReadFile(filepath.Join(root, doc))
	if err != nil {
		t.Fatalf("the metrics have to be described: %v", err)
	}
	described := make(map[string]bool)
	for _, name := range regexp.MustCompile(`kmirror_[a-z0-9_]+`).FindAllString(string(text), -1) {
		described[name] = true
	}
	names := make(map[string]string) // to the place of one use
	for _, s := range sources(t) {
		if s.isTest || strings.HasPrefix(s.path, "test/") {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if name, err := strconv.Unquote(lit.Value); err == nil && metricName.MatchString(name) {
					names[name] = s.path + ":" + strconv.Itoa(s.line(lit.Pos()))
				}
			}
			return true
		})
	}
	if len(names) == 0 {
		t.Fatal("found no metric in the program")
	}
	for name, place := range names {
		if !described[name] {
			t.Errorf("%s: %s isn't described in %s", place, name, doc)
		}
	}
}
