package config

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"time"
)

// setValue stores raw, as YAML or a text gave it, in field. The error says what was wanted.
func setValue(field reflect.Value, raw any) error {
	switch target := field.Addr().Interface().(type) {
	case *time.Duration:
		return setDuration(target, raw)
	case *Size:
		return setSize(target, raw)
	case *Servers:
		items, err := textList(raw)
		*target = nil
		for _, item := range items {
			*target = append(*target, splitList(item)...)
		}
		return err
	case *[]string:
		items, err := textList(raw)
		*target = items
		return err
	case *bool:
		return setBool(target, raw)
	case *int:
		return setInt(target, raw)
	}
	if at, ok := raw.(time.Time); ok { // YAML reads 2026-01-31T12:00:00Z as one
		raw = at.Format(time.RFC3339Nano)
	}
	text, ok := raw.(string)
	if !ok {
		return fmt.Errorf("want text, got %s", describe(raw))
	}
	field.SetString(text) // string and Secret
	return nil
}

func setDuration(target *time.Duration, raw any) (err error) {
	if text, ok := raw.(string); ok {
		if *target, err = time.ParseDuration(text); err == nil {
			return nil
		}
	}
	return fmt.Errorf("want a duration such as 10s, got %s", describe(raw))
}

func setSize(target *Size, raw any) (err error) {
	switch value := raw.(type) {
	case int:
		*target, err = ParseSize(strconv.Itoa(value))
	case string:
		*target, err = ParseSize(value)
	default:
		err = fmt.Errorf("want a size such as 256MiB, got %s", describe(raw))
	}
	return err
}

func setBool(target *bool, raw any) error {
	switch value := raw.(type) {
	case bool:
		*target = value
		return nil
	case string:
		if value == "true" || value == "false" {
			*target = value == "true"
			return nil
		}
	}
	return fmt.Errorf("want true or false, got %s", describe(raw))
}

func setInt(target *int, raw any) (err error) {
	switch value := raw.(type) {
	case int:
		*target = value
		return nil
	case string:
		if *target, err = strconv.Atoi(value); err == nil {
			return nil
		}
	case float64:
		if value == math.Trunc(value) && math.Abs(value) < 1<<53 {
			*target = int(value)
			return nil
		}
	}
	return fmt.Errorf("want a whole number, got %s", describe(raw))
}

// textList reads a list of texts, or one text of items between commas.
func textList(raw any) ([]string, error) {
	switch value := raw.(type) {
	case string:
		return splitList(value), nil
	case []any:
		items := make([]string, 0, len(value))
		for i, element := range value {
			text, ok := element.(string)
			if !ok {
				return nil, fmt.Errorf("[%d]: want text, got %s", i, describe(element))
			}
			items = append(items, text)
		}
		return slices.Clip(items), nil
	}
	return nil, fmt.Errorf("want a list, got %s", describe(raw))
}

// describe names a value and its kind for an error text.
func describe(raw any) string {
	switch value := raw.(type) {
	case string:
		return strconv.Quote(value)
	case []any:
		return "a list"
	case map[string]any:
		return "a section"
	case nil:
		return "nothing"
	default:
		return fmt.Sprintf("%v", value)
	}
}
