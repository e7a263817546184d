package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"kmirror/config"
)

// version is set by the linker for a release (-X main.version=v1.2.3).
var version = ""

// versionText is the release, or the commit that the binary was built from.
func versionText() string {
	if version != "" {
		return version
	}
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, setting := range build.Settings {
			if setting.Key == "vcs.revision" && len(setting.Value) >= 12 {
				return "dev-" + setting.Value[:12]
			}
		}
	}
	return "dev"
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintln(cmd.OutOrStdout(), "kmirror", versionText(), runtime.Version(), runtime.GOOS+"/"+runtime.GOARCH)
		},
	}
}

// addConfigFlags gives cmd --config and a flag for every setting.
func addConfigFlags(cmd *cobra.Command) {
	cmd.Flags().String("config", "", "settings file; see docs/operations.md (environment: "+config.FileVariable+")")
	config.AddFlags(cmd.Flags())
}

// configFile returns the settings file that cmd was given, or "".
func configFile(cmd *cobra.Command) string {
	if file, _ := cmd.Flags().GetString("config"); file != "" {
		return file
	}
	return os.Getenv(config.FileVariable)
}

// loadConfig reads the settings for cmd. Warnings go to the error output.
func loadConfig(cmd *cobra.Command) (config.Config, error) {
	settings, warnings, err := config.Load(configFile(cmd), os.Environ(), cmd.Flags())
	for _, warning := range warnings {
		fmt.Fprintln(cmd.ErrOrStderr(), "warning:", warning)
	}
	if err != nil {
		return settings, fmt.Errorf("the settings are not usable:\n%w", err)
	}
	return settings, nil
}

func newConfigCommand() *cobra.Command {
	parent := &cobra.Command{Use: "config", Short: "Look at the settings"}
	check := &cobra.Command{
		Use: "check", Short: "Tell every problem of the settings and exit 1, or exit 0", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			settings, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			if show, _ := cmd.Flags().GetBool("show"); show {
				fmt.Fprint(cmd.OutOrStdout(), config.Describe(settings))
				return nil
			}
			fmt.Fprintln(cmd.OutOrStdout(), "ok")
			return nil
		},
	}
	addConfigFlags(check)
	check.Flags().Bool("show", false, "print every setting as it is in force; secrets are redacted")
	parent.AddCommand(check)
	return parent
}
